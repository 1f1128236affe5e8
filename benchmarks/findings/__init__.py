"""Which findings of the five papers hold on models that run here: measurements, and the page docs/papers.md."""
