"""Task memory beside look-up without it, on streams of jobs whose texts repeat each other in part."""
