"""The HTTP front: OpenAI's protocol before one or more gateways. It holds no model and decodes no media."""
