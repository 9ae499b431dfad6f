"""Ways to hide a seven-digit number in a text and to ask for it, all of our own writing.

A method may do well on one sentence by luck: its queries happen to look for the words that carry the number. A set of
wordings with different nouns, verbs and word orders averages that out. Wording 0 is the one of the earlier results.
No calibration reads any of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phrasing:
    """One wording. `{key}` stands for the word that a number belongs to, `{number}` for the number."""

    one: str  # what stands before the text where one needle is hidden
    several: str  # the same where several are
    needle: str  # the sentence that is hidden
    question: str  # asked after the text
    prefix: str  # the start of the answer


PHRASINGS = (
    Phrasing(
        "An access code is hidden in the text below. Remember it: you will be asked for it afterwards.",
        "Access codes are hidden in the text below. Remember them: you will be asked for one afterwards.",
        "The access code for {key} is {number}.",
        "What is the access code for {key} given in the text above? Reply with the number only.",
        "The access code for {key} is",
    ),
    Phrasing(
        "Somewhere in these notes a parcel is mentioned with its number. Keep the number in mind for later.",
        "Somewhere in these notes parcels are mentioned with their numbers. Keep them in mind for later.",
        "The parcel marked {key} was registered under number {number}.",
        "Under which number was the parcel marked {key} registered?",
        "The parcel marked {key} was registered under number",
    ),
    Phrasing(
        "Read the following pages carefully. They name the locker of a club and the digits that open it.",
        "Read the following pages carefully. They name the lockers of some clubs and the digits that open them.",
        "Members of the {key} club open their locker with the digits {number}.",
        "Which digits open the locker of the {key} club?",
        "Members of the {key} club open their locker with the digits",
    ),
    Phrasing(
        "This text mentions the telephone number of a shop. You will need it at the end.",
        "This text mentions the telephone numbers of several shops. You will need one of them at the end.",
        "To reach the shop called {key}, please dial {number}.",
        "I would like to call the shop called {key}. What should I dial?",
        "To reach the shop called {key}, please dial",
    ),
    Phrasing(
        "One sentence of this report gives the serial number of a machine. Note it down.",
        "Some sentences of this report give the serial numbers of machines. Note them down.",
        "A plate on the machine named {key} shows the serial number {number}.",
        "What serial number does the plate on the machine named {key} show?",
        "The plate on the machine named {key} shows the serial number",
    ),
    Phrasing(
        "The secret number of an agent appears once in what follows. Do not forget it.",
        "The secret numbers of agents appear in what follows. Do not forget them.",
        "Agent {key} carries the secret number {number}.",
        "Which secret number does agent {key} carry?",
        "Agent {key} carries the secret number",
    ),
    Phrasing(
        "A library card is described in the following passage. Its number will be asked for.",
        "Library cards are described in the following passage. The number of one will be asked for.",
        "Remember that the library card of {key} has the number {number}.",
        "What number does the library card of {key} have?",
        "The library card of {key} has the number",
    ),
    Phrasing(
        "Within the text you will find the amount on an invoice. Pay attention to it.",
        "Within the text you will find the amounts on several invoices. Pay attention to them.",
        "The invoice from {key} came to exactly {number} crowns.",
        "To how many crowns did the invoice from {key} come?",
        "The invoice from {key} came to exactly",
    ),
    Phrasing(
        "These pages record the score of a player. Be ready to repeat it.",
        "These pages record the scores of several players. Be ready to repeat one of them.",
        "With {number} points, the player known as {key} holds the record.",
        "How many points does the player known as {key} have?",
        "The player known as {key} holds the record with",
    ),
    Phrasing(
        "Look for the account of a customer in the text and remember its number.",
        "Look for the accounts of customers in the text and remember their numbers.",
        "Our customer {key} asked us to use account {number} from now on.",
        "Which account did our customer {key} ask us to use?",
        "Our customer {key} asked us to use account",
    ),
    Phrasing(
        "The following text states which ticket won a prize. Keep the number of the ticket.",
        "The following text states which tickets won prizes. Keep the numbers of the tickets.",
        "The winning ticket of the {key} lottery is number {number}.",
        "What is the number of the winning ticket of the {key} lottery?",
        "The winning ticket of the {key} lottery is number",
    ),
    Phrasing(
        "A password is given away by mistake in the text below. Find it.",
        "Passwords are given away by mistake in the text below. Find them.",
        "By the way, the password of {key} is {number}.",
        "What is the password of {key}?",
        "The password of {key} is",
    ),
)
MIX = "mix"
