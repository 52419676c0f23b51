"""What the fork server of the tests holds beside imports: the digits, which nearly every cell reads."""

from vitsweep.data.digits import read_digits

read_digits()
