"""Documents in; page pictures and page drafts out. Imports no torch; what reads files runs in confined processes."""
