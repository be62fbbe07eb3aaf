"""Merging of the parts that a distributed job wrote: finding and joining them; DeepSpeed, Paddle Fluid."""
