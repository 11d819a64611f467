"""The manifests of configs/kubernetes: their form, and that they fit the product."""
