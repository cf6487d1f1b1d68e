"""Search for stop strings in a growing text, in constant time per character (Aho and Corasick, 1975)."""

from array import array
from collections.abc import Sequence

LETTER_BITS = 21  # of a code point
NO_LETTER = -1


class StopStrings:
    """Finds the first of several stop strings in a text that arrives in pieces.

    A state is a node of the stop strings' trie: the longest end of the text so far that begins one of them.
    NONE is that of an empty text. Requests with the same stop strings may share an instance. Nodes are
    numbered along the stop strings, so that few steps need an entry of a dict.
    """

    ROOT = 0

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "an empty stop string matches everywhere"
        self._first_letters = frozenset(stop[:1] for stop in stops)
        # Letters that lead from a node to the one numbered after it.
        self._next_letters = array("i", [NO_LETTER])
        self._other_nodes: dict[int, int] = {}  # other nodes, by the node before and the letter
        self._stop_lengths, self._held_lengths = array("i", [0]), array("i", [0])
        parents, letters = [self.ROOT], [""]
        for stop in stops:
            self._add_stop(stop, parents, letters)
        self._fill_tables(parents, letters)

    def __bool__(self) -> bool:
        return bool(self._first_letters)

    def _add_stop(self, stop: str, parents: list[int], letters: list[str]) -> None:
        """Add the nodes of a stop string that are new, each with its parent and the letter between them."""
        node = self.ROOT
        for length, letter in enumerate(stop, 1):
            child = self._child_node(node, ord(letter))
            if not child:
                child = len(parents)
                if node == child - 1:
                    self._next_letters[node] = ord(letter)
                else:
                    self._other_nodes[node << LETTER_BITS | ord(letter)] = child
                parents.append(node)
                letters.append(letter)
                for table, value in (
                    (self._next_letters, NO_LETTER),
                    (self._stop_lengths, 0),
                    (self._held_lengths, length),
                ):
                    table.append(value)
            node = child
        self._stop_lengths[node] = len(stop)

    def _fill_tables(self, parents: list[int], letters: list[str]) -> None:
        """Fill three tables, which have a number for each node, shorter beginnings first.

        _suffix_nodes: node of its longest other end that begins a stop string.
        _stop_lengths: length of the longest stop string at its end, 0 without one.
        _held_lengths: characters at its end that a longer stop string may begin with.
        """
        count, has_children = len(parents), bytearray(len(parents))
        for parent in parents:
            has_children[parent] = True
        self._suffix_nodes = array("i", [self.ROOT]) * count
        for node in sorted(range(1, count), key=self._held_lengths.__getitem__):
            parent = parents[node]
            suffix_node = (
                self.find_stop(self._suffix_nodes[parent], letters[node])[0] if parent else self.ROOT
            )
            self._suffix_nodes[node] = suffix_node
            self._stop_lengths[node] = self._stop_lengths[node] or self._stop_lengths[suffix_node]
            if not has_children[node]:
                self._held_lengths[node] = self._held_lengths[suffix_node]

    def _child_node(self, node: int, letter: int) -> int:
        """Return the node that a letter leads to, NONE if no stop string goes on with it."""
        if self._next_letters[node] == letter:
            return node + 1
        return self._other_nodes.get(node << LETTER_BITS | letter, self.ROOT)

    def find_stop(self, state: int, text: str, floor: int = 0) -> tuple[int, int, int]:
        """Read more text up to the first stop string that ends beyond its first `floor` characters.

        Returns the state behind it, the number of characters up to its end, and its length: of several that
        end together the longest, 0 if there is none.
        """
        if not state and self._first_letters.isdisjoint(text):
            return self.ROOT, len(text), 0
        steps, others, ended = self._next_letters, self._other_nodes, self._stop_lengths
        for count, letter in enumerate(map(ord, text), 1):
            while steps[state] != letter:
                child = others.get(state << LETTER_BITS | letter, self.ROOT)
                if child or not state:
                    state = child
                    break
                state = self._suffix_nodes[state]
            else:
                state += 1
            if ended[state] and count > floor:
                return state, count, ended[state]
        return state, len(text), 0

    def held_length(self, state: int) -> int:
        """Count the characters at the end of a text that are a proper beginning of a stop string."""
        return self._held_lengths[state]
