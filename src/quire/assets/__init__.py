"""The models that ship with the package. Data only."""
