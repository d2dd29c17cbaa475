"""What a figure shows, read from its first axes."""


def bars(figure):
    """Lengths of the bars, from top to bottom, and which are hatched."""
    axis = figure.axes[0]
    return [(round(patch.get_y() + 0.36), patch.get_width(), patch.get_hatch()) for patch in axis.patches]


def texts(figure):
    """Texts in the axes."""
    return [text.get_text() for text in figure.axes[0].texts]
