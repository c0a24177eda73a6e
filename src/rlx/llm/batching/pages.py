"""Pages of keys and values: which are free, and which hold the start of texts that may come again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PAGE = 64
"""Tokens whose keys and values one page holds."""


def pages_for(tokens: int) -> int:
    """How many pages hold so many tokens.

    >>> [pages_for(n) for n in (0, 1, 64, 65)]
    [0, 1, 1, 2]
    """
    return -(-tokens // PAGE)


class Pool:
    """Numbers of pages: free ones are taken, and given back.

    >>> pool = Pool(2)
    >>> pool.take(), pool.take(), pool.take()
    (0, 1, None)
    >>> pool.give(0)
    >>> pool.free
    1
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give(self, page: int) -> None:
        self._free.append(page)


class Prefix:
    """A full page of a text, with all that came before it: a node of the tree."""

    __slots__ = ("children", "page", "parent", "tokens", "users")

    def __init__(self, parent: Prefix | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent, self.tokens, self.page = parent, tokens, page
        self.children: dict[tuple[int, ...], Prefix] = {}
        self.users = 0


class PrefixTree:
    """Texts by their full pages. A page that no sequence uses stays until its memory is needed: the one that
    was released first goes first.

    >>> pool = Pool(2)
    >>> tree, text = PrefixTree(pool), list(range(2 * PAGE))
    >>> first = tree.add(None, text[:PAGE], pool.take())
    >>> second = tree.add(first, text[PAGE:], pool.take())
    >>> tree.release([first, second])
    >>> [len(tree.find(text, most)) for most in (127, 128, 500)]
    [1, 2, 2]
    >>> tree.take(), tree.take(), tree.take()
    (1, 0, None)
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.evicted = pool, 0
        self._roots: dict[tuple[int, ...], Prefix] = {}
        self._idle: OrderedDict[Prefix, None] = OrderedDict()  # children before their parents

    @property
    def idle(self) -> int:
        """Pages that are kept although no sequence uses them."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self.pool.free + self.idle

    def find(self, tokens: Sequence[int], most: int) -> list[Prefix]:
        """The pages at the start of a text that are known and end within its first `most` tokens."""
        found: list[Prefix] = []
        children = self._roots
        for end in range(PAGE, min(len(tokens), most) + 1, PAGE):
            node = children.get(tuple(tokens[end - PAGE : end]))
            if node is None:
                break
            found.append(node)
            children = node.children
        return found

    def hold(self, nodes: Sequence[Prefix]) -> None:
        """One more sequence uses these pages."""
        for node in nodes:
            if not node.users:
                del self._idle[node]
            node.users += 1

    def release(self, nodes: Sequence[Prefix]) -> None:
        """A sequence uses these pages no more; they are in the order of its text."""
        for node in reversed(nodes):
            node.users -= 1
            if not node.users:
                self._idle[node] = None

    def add(self, parent: Prefix | None, tokens: Sequence[int], page: int) -> Prefix:
        """Enter a full page that a sequence has. Where the same text has one already, the sequence uses that
        one from now on, and its own is free: both have the same bits.
        """
        key = tuple(tokens)
        children = self._roots if parent is None else parent.children
        node = children.get(key)
        if node is None:
            node = children[key] = Prefix(parent, key, page)
            node.users = 1
        else:
            self.hold([node])
            self.pool.give(page)
        return node

    def take(self) -> int | None:
        """A page to write to: a free one, or that of the text that was not used for longest."""
        page = self.pool.take()
        if page is not None or not self._idle:
            return page
        self.evicted += 1
        return self._evict()

    def _evict(self) -> int:
        node, _ = self._idle.popitem(last=False)
        assert not node.children, "a page is released after those that follow it"
        siblings = self._roots if node.parent is None else node.parent.children
        del siblings[node.tokens]
        return node.page

    def clear(self) -> None:
        """Forget what no sequence uses."""
        while self._idle:
            self.pool.give(self._evict())
