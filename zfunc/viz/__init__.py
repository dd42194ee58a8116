"""Pictures of a step, without torch.

legend                      the colour of a verb, the same everywhere
draw                        a plan or a timeline as text and as SVG
chrome_trace                a timeline for Perfetto
timeline_html               a page to zoom in; its script and style are in `web/`
compare                     measured beside simulated
"""
