"""One command a module, each with its settings, its help, what runs it, and these as its `COMMAND`.

What a command needs is imported when it runs, so that help and mistakes do not wait for torch.
"""
