"""From files in a folder to the parameters of a model. Knows no family and no operation."""
