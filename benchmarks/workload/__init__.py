"""One worker's choices beside every static setting, on a real model and real prompts, phase by phase."""
