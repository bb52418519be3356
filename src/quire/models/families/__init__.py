"""Model families, one file each: what its checkpoints look like and how it differs from the shared
decoder."""
