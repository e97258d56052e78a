"""From an artifact to samples. Nothing here knows an adapter, an exporter or a compiler."""
