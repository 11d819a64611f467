"""How many devices a deadline needs: from jobs that were decoded, how load slows them, and a fleet played over them."""
