"""`duetto verify`: runs an audit log's requests again and compares bits."""
