"""LLM.int8: ``Linear8bitLt`` and ``Int8Params``."""
