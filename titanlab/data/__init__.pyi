from .contract import DataConfig as DataConfig
from .contract import Stream as Stream
from .new_tokenizer import download_tokenizer as download_tokenizer
from .schema import Synthetic as Synthetic
from .source import Batch as Batch
from .text import write_token_shards as write_token_shards
from .tokenizers import declared_in as declared_in
from .tokenizers import keep as keep
