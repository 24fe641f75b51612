"""OpenAI's Responses API, translated to chats and back; responses are kept in memory."""
