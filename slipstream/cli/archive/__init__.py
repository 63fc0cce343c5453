"""`slipstream archive`: whole folders of videos, handed to a gateway's queue and fetched when they are captioned."""
