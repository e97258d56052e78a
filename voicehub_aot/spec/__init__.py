"""Data that build and run share: what a region is, and how it is sampled. Nothing here computes speech."""
