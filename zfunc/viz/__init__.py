"""Pictures of a step, without torch.

    legend          which operation has which colour, in every picture
    draw            a plan or a timeline as text and as SVG
    chrome_trace    a timeline for Perfetto
    timeline_html   a page to zoom in; its script and style are in `web/`
    compare         measured against simulated

Colours come from `legend` alone, so a verb looks the same everywhere.
"""
