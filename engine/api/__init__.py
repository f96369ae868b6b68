"""The HTTP room: the OpenAI API and what an operator needs beside it. Speaks to the gateway actor and to nobody else."""
