"""In which number formats a model computes, reduces and keeps its parameters."""
