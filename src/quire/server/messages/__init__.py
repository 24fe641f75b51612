"""Anthropic's Messages API, translated to chats and back."""
