"""Endpoints of pooling models: embeddings, raw pooling, classes, scores, reranking."""
