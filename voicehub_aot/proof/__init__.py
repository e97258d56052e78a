"""Evidence that engines compute what the model computes, and how long they take."""
