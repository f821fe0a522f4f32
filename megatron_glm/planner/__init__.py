"""What a run needs, from its configuration alone: memory, pipeline, work and traffic, as data and as text."""
