"""Pictures of a step, without torch.

    legend          the colour of each operation, in every picture
    timeline_text   timelines as text for a terminal
    timeline_svg    timelines as an SVG file
    chrome_trace    a timeline for Perfetto
    timeline_html   a page to zoom in
    live            a page that simulates plans while figures of the machine change
    web_page        a page in one file, from the parts in `web/`
    compare         measured against simulated
    charts          curves over steps
    notebook        plans, timelines and curves as a notebook shows them

Colours come from `legend` alone, so a verb looks the same everywhere.
"""
