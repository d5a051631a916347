"""A repository of three files with one bug, for a SWE-style agent to mend.

In: an empty folder. Out: the repository in it; the issue, the command that tests it, and the
answers of an agent that mended it, which can be replayed.
"""

from __future__ import annotations

from pathlib import Path

TEST = "python -m unittest -q"
ISSUE = """\
Baskets with a discount cost too much

A basket for 100.00 with a voucher of 20 % costs 80.00, as it should. With two vouchers, of 20 % and
of 10 %, it should cost 72.00: the second one is taken off what the first one left. We charge 90.00.
It looks as if only the last voucher counted.

Baskets without a voucher, and with one, are right. The tests in test_basket.py show all of this."""

FILES = {
    "README.md": """\
# basket

Prices of shopping baskets. `basket.py` holds the code, `test_basket.py` its tests:

    python -m unittest
""",
    "basket.py": '''\
"""Prices of shopping baskets, in cents."""


class Basket:
    """Items with a price and a number, and vouchers that take percents off the sum."""

    def __init__(self):
        self.items = []
        self.vouchers = []

    def add(self, name, price, number=1):
        if number < 1:
            raise ValueError(f"{name}: {number} pieces cannot be bought")
        self.items.append((name, price, number))

    def add_voucher(self, percent):
        if not 0 < percent < 100:
            raise ValueError(f"a voucher takes off 1 to 99 percent, not {percent}")
        self.vouchers.append(percent)

    def total(self):
        """What is to be paid."""
        return sum(price * number for _, price, number in self.items)

    def discounted(self):
        """What is to be paid after all vouchers, rounded to a whole cent."""
        price = self.total()
        for percent in self.vouchers:
            price = self.total() * (100 - percent) / 100
        return round(price)
''',
    "test_basket.py": """\
import unittest

from basket import Basket


class BasketTest(unittest.TestCase):
    def setUp(self):
        self.basket = Basket()
        self.basket.add("lamp", 4000, 2)
        self.basket.add("cable", 2000)

    def test_total(self):
        self.assertEqual(self.basket.total(), 10000)

    def test_without_voucher(self):
        self.assertEqual(self.basket.discounted(), 10000)

    def test_one_voucher(self):
        self.basket.add_voucher(20)
        self.assertEqual(self.basket.discounted(), 8000)

    def test_two_vouchers(self):
        self.basket.add_voucher(20)
        self.basket.add_voucher(10)
        self.assertEqual(self.basket.discounted(), 7200)

    def test_no_pieces(self):
        with self.assertRaises(ValueError):
            self.basket.add("bulb", 300, 0)
""",
}

_EDIT = "sed -i 's/price = self.total() \\* (100/price = price * (100/' basket.py"
MENDED = (
    "I look at what is here first.\n```bash\nls -l\n```",
    "The README says where the code and its tests are.\n```bash\ncat README.md\n```",
    "Now the code that computes prices.\n```bash\ncat -n basket.py\n```",
    f"The tests show what is expected; I run them as they are.\n```bash\n{TEST}\n```",
    "One fails, with 9000 for 7200. Here is that test.\n```bash\ncat -n test_basket.py\n```",
    "Inside the loop the price starts anew from the total, so that each voucher forgets the ones "
    "before it. I look at these lines again.\n```bash\ngrep -n 'percent' basket.py\n```",
    f"Each voucher has to be taken off the price so far.\n```bash\n{_EDIT}\n```",
    "I check that the line reads as I want it.\n```bash\ngrep -n 'price = ' basket.py\n```",
    f"Now all tests.\n```bash\n{TEST}\n```",
    "All tests pass.\n```bash\nsubmit\n```",
)
"""An agent's answers, one for each step; the commands work when they are run."""


def write_repository(folder: Path) -> Path:
    """The repository in `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
