"""What every page of alphaloop shares, the report's and the console's: the style and the way to templates."""
