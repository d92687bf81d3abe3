"""The prompts that ``specrun bench`` brings along, each for another kind of work.

They differ in what speculative decoding lives on: how much of the answer stands in the prompt
already. Own text, a few hundred tokens each. Standard library only.
"""

from __future__ import annotations

_HARBOUR = (
    "The harbour of Ellerby was dug by hand in the winter of 1846, when the herring stayed away"
    " and two hundred families had nothing else to live on. The town paid them in bread and coal."
    " They moved forty thousand cartloads of clay, and the last of them, a boy of twelve, is said"
    " to have carried the stone that still marks the northern end of the quay. For sixty years the"
    " boats came home to it every evening. Then the railway brought ice, the larger boats stayed"
    " out for a week at a time, and the harbour became too shallow for them. Today it holds nine"
    " small boats, a ferry that runs from May to September, and a school for sailing that is full"
    " all summer. The clay from the basin was spread on the fields behind the church, which are"
    " the best in the parish."
)

_MEETING = (
    "Notes of the meeting on Tuesday. Present: Ines, Karel, Dorothy, Sam. The new pump house was"
    " inspected on the third of the month. Karel reports that both pumps reach their pressure, but"
    " that the second one is louder than the contract allows: 71 decibels at the fence, where 65"
    " are permitted. The supplier offers a cover, which would cost nothing and take five weeks."
    " Ines doubts that a cover is enough and wants the bearings to be looked at first. Dorothy has"
    " had two letters from neighbours and has answered both. The budget stands at 212,000, of which"
    " 187,500 is spent; the paving of the yard is not in it and will have to wait for next year."
    " Sam asks whether the old pump can be kept as a spare. It can, if the shed gets a new roof,"
    " for which he will find a price. It was decided to have the bearings checked before the end"
    " of the month, to accept the cover if they are sound, and to meet again in four weeks."
)

_CODE = '''\
class Inventory:
    """What is in stock, by name."""

    def __init__(self):
        self.items = {}

    def add(self, name, count, price):
        if count < 1:
            raise ValueError("count must be at least 1")
        if name in self.items:
            old_count, old_price = self.items[name]
            self.items[name] = (old_count + count, price)
        else:
            self.items[name] = (count, price)

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        old_count, price = self.items[name]
        if count > old_count:
            raise ValueError("there are not so many of them")
        if count == old_count:
            del self.items[name]
        else:
            self.items[name] = (old_count - count, price)

    def value(self):
        return sum(count * price for count, price in self.items.values())
'''

WORKLOADS: dict[str, str] = {
    # Nearly everything that is written stands in the prompt.
    "copy-edit": (
        "Repeat the following text word for word, but change the name of the town to Marwick and"
        " the year to 1851. Write nothing else.\n\n" + _HARBOUR
    ),
    # Names, numbers and phrases come back, in new sentences.
    "summarise": "Summarise these notes for somebody who was not there.\n\n" + _MEETING,
    # An answer of its own to a question with some context.
    "chat": (
        "I have rented a small flat on the fourth floor with a balcony that faces south-west. It"
        " is about one metre deep and four metres long, it gets the full sun from noon until the"
        " evening, and it is windy because nothing stands in front of it. I am away for three or"
        " four days every other week, and nobody can water the plants while I am gone. I have"
        " never grown anything before, I would like to spend no more than a hundred in the first"
        " year, and I would be glad if something could be eaten. The landlord does not allow"
        " anything to be drilled into the wall or hung over the outside of the railing, and the"
        " floor may carry two hundred kilograms per square metre. I have two large wooden boxes,"
        " eighty by forty by forty centimetres, which my sister no longer needs, and a folding"
        " chair that should still have room. What would you plant, in which order, and what should"
        " I buy first? Please explain how I can keep everything alive while I am away, and tell me"
        " what usually goes wrong in the first summer."
    ),
    # Identifiers and patterns repeat, the lines are new.
    "code": (
        "Here is a Python class.\n\n"
        + _CODE
        + "\nWrite the class again with type hints, a docstring for every method, and a new method"
        " `rename(old, new)` that keeps count and price. Give only the code."
    ),
    # Free continuation: little to copy.
    "prose": (
        "Continue this story.\n\n"
        "The letter came on the first warm day of the year, when the windows of the office stood"
        " open and the noise of the street came in with the smell of tar. Agnes knew the hand at"
        " once, although she had not seen it for eleven years. She put the envelope under the"
        " blotter and went on adding the column of figures, and when she reached the foot of it"
        " she found that she had no idea what the sum was of. At noon the others went down to eat"
        " by the river. She stayed, as she often did, and waited until the last steps on the"
        " stairs were gone. Then she took out the letter and looked at the stamp, which showed a"
        " bird she did not know, and at the postmark, which had been smudged by rain or by a wet"
        " thumb. It was thin: one sheet, perhaps two. Her brother had never been a man for long"
        " letters. The last one, which she kept in a biscuit tin with her papers, had been four"
        " lines, of which three were about the price of a horse. She took the paper knife from the"
        " drawer, held the envelope against the light once more, and slit it open along the top."
    ),
}
