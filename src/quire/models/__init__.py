"""Model families as differences over shared blocks. Nothing here knows requests or files."""
