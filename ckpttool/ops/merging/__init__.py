"""One whole out of the parts that a distributed job wrote."""
