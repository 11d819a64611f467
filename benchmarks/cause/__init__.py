"""How often the cause of a fall is named rightly, over simulated histories whose cause is known."""
