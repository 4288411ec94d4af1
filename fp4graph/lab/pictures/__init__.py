"""Pictures of what quantization does to a training: panels, figures, colours."""
