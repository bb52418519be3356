"""Model families, one file each: how a family differs from the shared decoder, and how its
checkpoints name things. No family imports another."""
