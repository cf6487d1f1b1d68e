if __name__.partition(".")[0] != "duetto":
    raise ImportError(f"import duetto.{__name__}, not {__name__}: the repository root is on sys.path")
