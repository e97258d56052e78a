"""An artifact as a folder for other hosts and servers."""
