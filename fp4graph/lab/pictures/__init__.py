"""Pictures of a training's statistics: panels, figures, colours."""
