"""Bodies of the OpenAI routes: what may be asked, with a bound on everything, and what is answered."""
