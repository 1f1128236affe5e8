"""Makes document pages with questions about their fields: receipts, invoices, forms and tables in real fonts.

    python -m benchmarks.documents FOLDER --size 384    held-out pages and their questions, for `vlkv eval`

`benchmarks.train_reader` trains on these pages. Every answer is printed on its page, and sums add up. A set, a number
and a size determine a page; its pixels also depend on the version of the font renderer.

Training pages and held-out pages have no name, product, code, price or date in common: a word or a number is held out
if the codes of its characters add up to a multiple of five (`is_held_out`). Sums, quantities and labels of fields occur
in both sets. The seeds are [0, number, size] for training and [1, number, size] for held-out pages.

`HELD_OUT` contains the held-out questions, one per page. They were committed before the first training: do not tune a
method on them.
"""
