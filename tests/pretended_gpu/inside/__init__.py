"""Tests of what happens on the device."""
