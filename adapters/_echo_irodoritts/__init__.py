"""What Echo and Irodori share: the rectified-flow transformer, its checkpoints, its sampling."""
