from .report import check_matplotlib as check_matplotlib
from .report import write_report as write_report
