"""Rules: which mesh axes a logical axis is split over; trees laid out by them."""
