"""Are the values of two tensors equal, and if not, how far are they apart?

Bytes come before values: all pairs are compared as they are stored, at the speed of memory and without
NumPy; what differs is read again and measured in float64. That happens in processes, since threads of one
process wait for each other's NumPy. Sums of ranges are added without rounding, so that the number of
processes changes no digit.
"""
