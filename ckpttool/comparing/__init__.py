"""Are the values of two tensors equal, and if not, how far are they apart?"""
