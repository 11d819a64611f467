"""What people are told without asking, and the services that carry it to them."""
