"""What commands answer: facts as plain data for JSON, and the same facts in words for tables and pages."""
