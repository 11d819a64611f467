"""The first hour of a new user: the commands of the README and the guides, typed in order, their output compared."""
