"""What Chatterbox's S3Gen and CosyVoice share: the causal decoder, its checkpoints, its flow."""
