"""The page's plots: each takes the document, draws one idea, and gives None where that was not measured."""
